"""The sink cache: `layout` decides in integers, `blocks` in masks, `sink` moves the tensors."""
