"""SERVING a finished run over HTTP: answers with uncertainty, abstentions, and a watch over what is asked."""
