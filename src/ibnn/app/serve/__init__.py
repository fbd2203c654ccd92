"""Serves a model over HTTP: answers with uncertainty, abstentions, and a monitor of the inputs."""
