"""Tools for trained runs: loading, sharing, learning curves, video files, export."""
