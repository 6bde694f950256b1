/* Makes one graph of a file: nodes, attributes, edges. Calls the driver that the process has
   loaded, with types of its own: it needs no header and no library of CUDA. */
#include <stdint.h>
#include <stdlib.h>

enum { KERNEL = 0, COPY = 1, FILL = 2, MOST_ARGUMENTS = 4096 };

typedef struct { uint32_t kind, kernel, launch[7]; uint64_t start; } Node;
typedef struct { uint32_t at, memory; uint64_t offset; } Pointer;
typedef struct { uint32_t node, which; char value[64]; } Attribute;
typedef struct { uint32_t source, target; uint64_t kind; } Edge;
/* A kernel's handle, and its part of the table of argument offsets. */
typedef struct { void *handle; uint32_t first, count; } Function;
/* CUDA_KERNEL_NODE_PARAMS */
typedef struct { void *function; uint32_t launch[7]; void **arguments, *rest[3]; } Launch;
typedef struct {
    const Node *nodes; const Pointer *pointers; const Attribute *attributes; const Edge *edges;
    char *blob;
    uint64_t node_count, pointer_count, attribute_count, edge_count;
    const Function *functions; const uint32_t *offsets; const uint64_t *bases; void *context;
} Graph;

extern int cuCtxSetCurrent(void *), cuGraphCreate(void **, unsigned);
extern int cuGraphAddKernelNode_v2(void **, void *, void *const *, size_t, const Launch *);
extern int cuGraphAddMemcpyNode(void **, void *, void *const *, size_t, const void *, void *);
extern int cuGraphAddMemsetNode(void **, void *, void *const *, size_t, const void *, void *);
extern int cuGraphKernelNodeSetAttribute(void *, int, const void *);
extern int cuGraphAddDependencies_v2(void *, void *const *, void *const *, const void *, size_t);

static int add_node(const Graph *graph, const Node *node, void *made, void **handle) {
    char *start = graph->blob + node->start;
    if (node->kind == COPY) return cuGraphAddMemcpyNode(handle, made, NULL, 0, start, graph->context);
    if (node->kind == FILL) return cuGraphAddMemsetNode(handle, made, NULL, 0, start, graph->context);
    if (node->kind != KERNEL) return -1;
    const Function *function = graph->functions + node->kernel;
    void *arguments[MOST_ARGUMENTS];
    Launch launch = {.function = function->handle, .arguments = arguments};
    for (int i = 0; i < 7; i++) launch.launch[i] = node->launch[i];
    if (function->count > MOST_ARGUMENTS) return -1;
    for (uint32_t i = 0; i < function->count; i++)
        arguments[i] = start + graph->offsets[function->first + i];
    return cuGraphAddKernelNode_v2(handle, made, NULL, 0, &launch);
}

/* Returns the first CUresult that is not 0, or -1. The caller destroys the graph. */
int make(const Graph *graph, void **made) {
    uint64_t nodes = graph->node_count, edges = graph->edge_count;
    void **handles = malloc((nodes + 3 * edges + 1) * sizeof(void *));
    void **sources = handles + nodes, **targets = sources + edges;
    uint64_t *kinds = (uint64_t *)(targets + edges);
    int status = handles ? cuCtxSetCurrent(graph->context) : -1;
    if (!status) status = cuGraphCreate(made, 0);
    for (const Pointer *each = graph->pointers; each < graph->pointers + graph->pointer_count; each++)
        *(uint64_t *)(graph->blob + each->at) = graph->bases[each->memory] + each->offset;
    for (uint64_t i = 0; !status && i < nodes; i++)
        status = add_node(graph, graph->nodes + i, *made, handles + i);
    for (uint64_t i = 0; !status && i < graph->attribute_count; i++) {
        const Attribute *each = graph->attributes + i;
        status = cuGraphKernelNodeSetAttribute(handles[each->node], each->which, each->value);
    }
    for (uint64_t i = 0; !status && i < edges; i++) {
        sources[i] = handles[graph->edges[i].source];
        targets[i] = handles[graph->edges[i].target];
        kinds[i] = graph->edges[i].kind;
    }
    if (!status && edges) status = cuGraphAddDependencies_v2(*made, sources, targets, kinds, edges);
    free(handles);
    return status;
}
