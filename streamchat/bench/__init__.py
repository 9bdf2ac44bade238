"""What `streamchat bench` measures; it knows no terminal."""
