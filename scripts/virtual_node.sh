# The first process of a node of a virtual cluster, in namespaces of its own already.
# It says its pid, waits until its interfaces are there, makes the node, says `ready`, and then
# only is.
# Usage: sh virtual_node.sh NAME HOSTS SHM ADDRESSES owned|kept
# ADDRESSES: of eth0, eth1 ..., with blanks between; each is one of a network of 256 (/24).
set -e
name=$1 hosts=$2 shm=$3 addresses=$4 life=$5

read -r pid rest </proc/self/stat # as seen from outside: /proc is still the old one
echo "$pid"
read -r go # no such word, as the caller is gone: this is the end

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
    # The host's default may be one for other links: bbr has half the rate on these.
    ip route replace "${address%.*}.0/24" dev "$device" proto kernel scope link src "$address" \
        congctl cubic 2>/dev/null || true
    rail=$((rail + 1))
done

echo ready
# Children whose signal is ignored are reaped by the kernel: so are the orphans of this node.
if [ "$life" = owned ]; then
    exec env --ignore-signal=CHLD cat >/dev/null # until its owner ends, in whatever way
fi
exec env --ignore-signal=CHLD sleep infinity </dev/null >/dev/null
