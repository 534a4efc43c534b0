"""The featurizer, the build and the sample stream. Importing this imports nothing heavy."""
