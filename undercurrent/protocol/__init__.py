"""The protocol, pure: messages, who holds what, and what may be committed. Events in, actions out; no clock, no I/O."""
