"""One database: Engines, pools, deadlines, sessions, and its errors in taskguard's words."""
