"""`bumpgate notify`: one message per cause, on GitHub, in a chat, or to a command."""
