"""Pure tensor functions: rotary embedding and attention. They keep no state."""
