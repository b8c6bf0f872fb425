"""What keeps a run alive and reports on it: opening, building, saving, stopping, logging, prices. Nothing here computes
what a step computes."""
