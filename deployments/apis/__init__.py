"""The APIs: one folder each for its requests and their answers. Beside them, what answers of all APIs share."""
