"""The Avro schemas of every topic, shipped as package data; see README.md beside this file."""
