"""What keeps a run alive and tells how it goes. Needed to follow a run, not the arithmetic of a step."""
