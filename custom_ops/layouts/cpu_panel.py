"""Layout ``cpu_panel`` (FORMAT.md section 2)."""
