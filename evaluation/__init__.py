"""Scores beside the val loss: HellaSwag, and public curves to compare a run with."""
