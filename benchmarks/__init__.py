"""Side-by-side measurements that anyone can repeat; each is one command under torchrun."""
