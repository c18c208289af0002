"""What whoever hands out work needs: members and their work (docs/architecture.md)."""
