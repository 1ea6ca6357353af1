"""Quality as commands: public long-context tasks, answered with full attention and under every selector and budget."""
