"""How a framework's autograd is told about backends, once for each framework."""
