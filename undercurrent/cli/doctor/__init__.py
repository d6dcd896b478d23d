"""`undercurrent doctor MODEL`: is what is captured of this model, on this machine, right?"""
