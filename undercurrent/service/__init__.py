"""What every service needs around its work: configuration, logs, metrics, health, signals. Knows no Kafka."""
