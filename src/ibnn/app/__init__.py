"""APP: the command line and the service."""
