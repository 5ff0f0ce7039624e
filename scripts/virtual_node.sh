# The first process of a node of a virtual cluster, in namespaces of its own already.
# It prints its pid, waits until its interfaces exist, sets up the node, prints `ready`, and then
# only keeps the namespaces open.
# Usage: sh virtual_node.sh NAME HOSTS SHM ADDRESSES owned|kept
# ADDRESSES: of eth0, eth1 ..., separated by blanks; each in a network of 256 addresses (/24).
set -e
name=$1 hosts=$2 shm=$3 addresses=$4 life=$5

read -r pid rest </proc/self/stat # as seen from outside: /proc is still the old one
echo "$pid"
read -r go # if the caller has ended, there is no line, and the script ends here

mount -t proc proc /proc
{ echo "$name" >/proc/sys/kernel/hostname; } 2>/dev/null || hostname "$name"
mount --bind "$hosts" /etc/hosts
mount -t tmpfs -o "size=$shm,mode=1777" tmpfs /dev/shm
mount -t tmpfs -o size=64m,mode=755 tmpfs /run
mkdir -p -m 700 "/run/user/$(id -u)"

ip link set lo up
rail=0
for address in $addresses; do
    device=eth$rail
    [ ! -e /proc/sys/net/ipv6 ] || echo 1 >"/proc/sys/net/ipv6/conf/$device/disable_ipv6"
    ip -batch - <<END
address add $address/24 brd + dev $device
link set $device up
END
    # The host's default may suit other links: bbr reaches half the rate on these.
    ip route replace "${address%.*}.0/24" dev "$device" proto kernel scope link src "$address" \
        congctl cubic 2>/dev/null || true
    rail=$((rail + 1))
done

echo ready
# If SIGCHLD is ignored, the kernel reaps children, and so the orphans of this node.
if [ "$life" = owned ]; then
    exec env --ignore-signal=CHLD cat >/dev/null # until its owner ends
fi
exec env --ignore-signal=CHLD sleep infinity </dev/null >/dev/null
