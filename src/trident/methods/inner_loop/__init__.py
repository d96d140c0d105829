"""Methods that adapt the network's weights to each task by gradient steps: MAML and its Bayesian relatives."""
