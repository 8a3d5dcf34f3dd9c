"""Generation of rollouts without training: the command `slimx generate`, and engines without trainers."""
