"""What `streamchat pipe` does with input that never ends; it knows no terminal."""
