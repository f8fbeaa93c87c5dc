"""Programs that measure: one file a question, results with hardware, versions, commit and command under results/."""
