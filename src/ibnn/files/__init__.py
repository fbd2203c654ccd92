"""FILES: models on disk, on the hub, and exported."""
