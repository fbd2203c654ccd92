"""Serves a finished run over HTTP: answers with uncertainty, abstentions, and a monitor of the inputs."""
