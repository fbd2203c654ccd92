"""ASKING a finished run: images read, answers given, abstentions. What the command line and the service share."""
