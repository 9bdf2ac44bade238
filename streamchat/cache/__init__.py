"""The sink cache: `layout` decides in integers, `sink` moves the tensors."""
