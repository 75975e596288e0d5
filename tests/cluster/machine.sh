#!/bin/bash
# machine.sh NAME CHECKOUT ENVIRONMENT
# Init of one machine of fleet.sh, in namespaces of its own: a home directory, temporary files, shared memory, and sshd.
# The rest of the file system is that of the real machine.
set -euo pipefail
name=$1 checkout=$2 environment=$3

hostname "$name"
for folder in /run/home /tmp /dev/shm /var/log; do
    mount -t tmpfs tmpfs $folder
done
chmod 700 /run/home # else sshd trusts nothing in it
: > /var/log/lastlog

# Root lives in /run/home here, and has no password: sshd refuses an account that is locked by a "!".
sed 's|^root:.*|root:x:0:0:root:/run/home:/bin/bash|' /etc/passwd > /tmp/passwd
echo 'root:*:1::::::' > /tmp/shadow
mount --bind /tmp/passwd /etc/passwd
mount --bind /tmp/shadow /etc/shadow

mkdir -m 700 /run/home/.ssh
cp /run/fleet/key.pub /run/home/.ssh/authorized_keys
# The operator's laptop and the client work in the checkout; the servers have what `ray up` puts into ~/consort.
code=/run/home/consort
if [ "$name" = laptop ] || [ "$name" = client ]; then
    code=$checkout
fi
if [ "$name" = laptop ]; then
    cp /run/fleet/key /run/home/.ssh/id_ed25519
    printf '%s\n' 'StrictHostKeyChecking no' 'UserKnownHostsFile /dev/null' 'LogLevel ERROR' > /run/home/.ssh/config
fi
cat > /run/home/.bashrc << END
export PATH=$(printf %q "$environment/bin"):\$PATH PYTHONPATH=$(printf %q "$code") PYTHONDONTWRITEBYTECODE=1
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
export RAY_prestart_worker_first_driver=0 # all machines share the cores of one
END

ssh-keygen -q -t ed25519 -N '' -f /tmp/host-key
exec /usr/sbin/sshd -D -e -f /dev/null -h /tmp/host-key -o PidFile=none -o UsePAM=no
