"""What runs in each step; pure Python and NumPy."""
