"""Pages: one HTML file to look at, of a recording, a prediction, a comparison, plans or a sweep."""
