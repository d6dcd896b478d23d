"""`undercurrent demo`: the whole ring on this machine, and a real model stopped by a probe in another process."""
