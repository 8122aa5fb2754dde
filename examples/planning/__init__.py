"""What `examples.plan` computes with: weights and how they are cut, layouts, bytes on each GPU. Arithmetic alone, no torch."""
