"""What is written and read: saved models, the hub, exported files."""
