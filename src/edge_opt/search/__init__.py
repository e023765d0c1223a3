"""Search: build and measure candidates in processes of their own, and choose among them."""
