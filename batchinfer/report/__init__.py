"""A finished job as one self-contained HTML page with its plots. Entered by write.write_report."""
