"""ASKING a finished run: read inputs, predict, abstain. Shared by the command line and the service."""
