/* The CPU form of the tree builder: best-first search over fixed-point costs, and the ancestor mask.
 * The order of nodes is that of ddtree/tree.py, digit for digit. Plain C, no libraries but libm. */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* One heap entry a node: its best child not yet taken. `key` orders by cost, depth, parent: 31 + 5 + 28 bits. */
typedef struct {
    uint64_t key;
    int32_t rank;
} entry;

static void sift_down(entry *heap, int64_t size, entry item) {
    int64_t at = 0, child;
    while ((child = 2 * at + 1) < size) {
        if (child + 1 < size && heap[child + 1].key < heap[child].key) child++;
        if (item.key <= heap[child].key) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = item;
}

static void sift_up(entry *heap, int64_t at, entry item) {
    while (at > 0) {
        int64_t above = (at - 1) / 2;
        if (heap[above].key <= item.key) break;
        heap[at] = heap[above];
        at = above;
    }
    heap[at] = item;
}

/* Round as torch does (ties to even); NaN and costs above max_edge are impossible: -1. */
static int64_t edge(float log_prob, float one_nat, int64_t max_edge) {
    float cost = rintf(log_prob * -one_nat);
    if (!(cost <= (float)max_edge)) return -1;
    return cost > 0 ? (int64_t)cost : 0;
}

/* log_probs and ids: [limit, width], row-major, each row best first. `memory` has six rows of `stride` bytes, each of
 * budget + 1 numbers: tokens, parents, depths, costs, with the root already written; the last two are scratch for the
 * heap. Returns the number of nodes, root included. */
int64_t ddtree_build(const float *log_probs, const int64_t *ids, int64_t limit, int64_t width, int64_t budget,
                     float one_nat, int64_t max_edge, char *memory, int64_t stride) {
    int64_t *tokens = (int64_t *)memory, *parents = (int64_t *)(memory + stride);
    int64_t *depths = (int64_t *)(memory + 2 * stride), *costs = (int64_t *)(memory + 3 * stride);
    entry *heap = (entry *)(memory + 4 * stride);
    int64_t size = 0, count = 1, first;
    if (limit > 0 && width > 0 && (first = edge(log_probs[0], one_nat, max_edge)) >= 0)
        heap[size++] = (entry){(uint64_t)first << 33 | (uint64_t)1 << 28, 0};
    while (size > 0 && count <= budget) {
        entry best = heap[0];
        int64_t cost = best.key >> 33, depth = best.key >> 28 & 31, parent = best.key & 0xfffffff;
        const float *row = log_probs + (depth - 1) * width;
        tokens[count] = ids[(depth - 1) * width + best.rank];
        parents[count] = parent;
        depths[count] = depth;
        costs[count] = cost;
        int64_t step = best.rank + 1 < width ? edge(row[best.rank + 1], one_nat, max_edge) : -1;
        if (step >= 0) {
            uint64_t key = (uint64_t)(costs[parent] + step) << 33 | (best.key & 0x1ffffffff);
            sift_down(heap, size, (entry){key, best.rank + 1});
        } else if (--size > 0) {
            sift_down(heap, size, heap[size]);
        }
        if (depth < limit && (step = edge(row[width], one_nat, max_edge)) >= 0) {
            uint64_t key = (uint64_t)(cost + step) << 33 | (uint64_t)(depth + 1) << 28 | (uint64_t)count;
            sift_up(heap, size++, (entry){key, 0});
        }
        count++;
    }
    return count;
}

/* Reflexive transitive closure of `parents` [n] (root -1) into `mask` [n, n], one byte an entry. */
void ddtree_closure(const int64_t *parents, int64_t n, uint8_t *mask) {
    memset(mask, 0, n * n);
    for (int64_t node = 0; node < n; node++) {
        if (parents[node] >= 0) memcpy(mask + node * n, mask + parents[node] * n, parents[node] + 1);
        mask[node * n + node] = 1;
    }
}
