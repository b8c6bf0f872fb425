"""What a run measures beside its training loss: the list of evaluations, HellaSwag, and the curves of public runs."""
