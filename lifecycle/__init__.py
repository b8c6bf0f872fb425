"""What keeps a run alive and tells how it goes. A reader of the training step needs nothing of it."""
