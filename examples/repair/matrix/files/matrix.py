def transpose(rows):
    for i in range(len(rows)):
        for j in range(i):
            rows[i][j], rows[j][i] = rows[j][i], rows[i][j]
    return rows
