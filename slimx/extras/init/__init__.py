"""`slimx init`: writes the configuration file of a first run for a model, prompts and a machine."""
