"""Tools for trained runs: plots, videos, exports, the Hugging Face Hub."""
