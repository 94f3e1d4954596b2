/* A stand-in for pyxis: srun accepts the options of pyxis, and each task prints their values. No container starts.
 *
 * The declarations copy Slurm's <slurm/spank.h>, so Slurm's development package is not needed. VERSION is Slurm's
 * own, (major << 16) + (minor << 8) + micro: Slurm rejects plugins of another version.
 */
#include <stdio.h>
#include <string.h>

typedef struct spank_handle *spank_t;
struct spank_option {
    char *name, *arginfo, *usage;
    int has_arg, val;
    int (*callback)(int val, const char *argument, int remote);
};
int spank_option_register(spank_t spank, struct spank_option *option);

const char plugin_name[] = "pyxis stand-in";
const char plugin_type[] = "spank";
const unsigned int plugin_version = VERSION;
const unsigned int spank_plugin_version = 1;

enum { IMAGE, MOUNTS, WORKDIR, OPTIONS };
static char given[OPTIONS][4096];

static int keep(int val, const char *argument, int remote)
{
    (void)remote;
    strncpy(given[val], argument, sizeof given[val] - 1);
    return 0;
}

static struct spank_option options[OPTIONS] = {
    {"container-image", "IMAGE", "image", 1, IMAGE, keep},
    {"container-mounts", "SOURCE:TARGET[,...]", "mounts", 1, MOUNTS, keep},
    {"container-workdir", "PATH", "working directory", 1, WORKDIR, keep},
};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    for (int i = 0; i < OPTIONS; i++)
        if (spank_option_register(spank, &options[i]))
            return -1;
    return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
    (void)spank, (void)argc, (void)argv;
    if (*given[IMAGE])
        fprintf(stderr, "pyxis: %s in %s with %s\n", given[IMAGE], given[WORKDIR], given[MOUNTS]);
    return 0;
}
