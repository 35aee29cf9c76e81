"""Linears that files hold quantised: what is found in a file, and how several tensors become one weight."""
