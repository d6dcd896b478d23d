"""What a deployment needs: bytes on its topics, disks, partitions, cores, and the time that a broker may be away."""
