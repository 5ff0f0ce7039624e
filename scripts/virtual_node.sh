# The first process of a node of a virtual cluster, in namespaces of its own already.
# It says its pid, waits until there is an eth0, makes the node, says `ready`, and then only is.
# Usage: sh virtual_node.sh NAME ADDRESS NETWORK HOSTS SHM owned|kept
set -e
name=$1 address=$2 network=$3 hosts=$4 shm=$5 life=$6

read -r pid rest </proc/self/stat # as seen from outside: /proc is still the old one
echo "$pid"
read -r go # no such word, as the caller is gone: this is the end

mount -t proc proc /proc
{ echo "$name" >/proc/sys/kernel/hostname; } 2>/dev/null || hostname "$name"
mount --bind "$hosts" /etc/hosts
mount -t tmpfs -o "size=$shm,mode=1777" tmpfs /dev/shm
mount -t tmpfs -o size=64m,mode=755 tmpfs /run
mkdir -p -m 700 "/run/user/$(id -u)"

[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6
ip -batch - <<END
link set lo up
address add $address/24 brd + dev eth0
link set eth0 up
END
# The host's default may be one for other links: bbr has half the rate on these.
ip route replace "$network" dev eth0 proto kernel scope link src "$address" \
    congctl cubic 2>/dev/null || true

echo ready
# Children whose signal is ignored are reaped by the kernel: so are the orphans of this node.
if [ "$life" = owned ]; then
    exec env --ignore-signal=CHLD cat >/dev/null # until its owner ends, in whatever way
fi
exec env --ignore-signal=CHLD sleep infinity </dev/null >/dev/null
