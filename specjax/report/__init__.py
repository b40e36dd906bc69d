"""What people look at: tables and traces."""
