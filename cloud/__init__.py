"""Machines of others: the supervisor behind train.sh, a Slurm script, a Docker image."""
