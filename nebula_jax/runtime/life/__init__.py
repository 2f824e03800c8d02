"""The life of processes: started, watched, ended."""
